"""From red to culprit: which commit between a good one and a bad one did it."""
