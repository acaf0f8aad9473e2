"""What a change does to the answers: lm-eval tasks, the embedded guard model, floors and paired comparisons."""
