"""Pure maths of RLHF: tensors in, tensors or NamedTuples out."""
