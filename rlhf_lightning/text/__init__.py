"""Messages to tokens and back: templates, rendering, control tokens, turn ends, decoding."""
