"""Sources that come with the platform: a folder each."""
