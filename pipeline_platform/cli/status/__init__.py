"""`pipeline-platform status`: the state of pipelines, gathered for `status`, its JSON and the dashboard."""
