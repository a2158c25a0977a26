"""Three rounds of RLHF against one round of as many PPO iterations."""
