"""The doctor's judgement, apart from any run: what is measured, when it is too much, what helps."""
