"""Optional: runs that begin in a process which has loaded the project before."""
