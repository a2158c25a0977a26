"""Gold and proxy reward as functions of the KL from the SFT policy."""
