"""Commands `pipeline-platform failures`: failures, their causes and their retries."""
