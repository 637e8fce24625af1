"""Sources that come with the platform: a folder each; and the templates of a new pipeline with one of them."""
