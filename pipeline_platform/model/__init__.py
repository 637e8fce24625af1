"""Model of a pipeline: messages, options, the pipeline's class, and the columns of its tables."""
