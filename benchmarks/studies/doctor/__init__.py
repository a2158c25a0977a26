"""PPO of a real model, healthy and sick, with the doctor as it is shipped."""
