"""This deployment's pull producers: sensors that ask for runs, sized by demand and rate limits."""
