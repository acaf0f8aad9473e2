"""What .ci/rehearse is made of: expressions, GitHub's part, a night, its commands, and what may go wrong in it."""
