"""Reports of runs to Dagster: materialisations, checks, figures of stages and data versions."""
