"""Linear and generalised linear mixed models by lme4's formulas, over groups whose rows stay where they
are."""
