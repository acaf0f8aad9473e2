"""The effect of a change on answers: lm-eval tasks, floors and paired comparisons."""
