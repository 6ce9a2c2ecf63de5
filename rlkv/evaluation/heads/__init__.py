"""Finding heads and measuring them."""
