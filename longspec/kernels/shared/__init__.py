"""What backends exchange, and the properties of the device."""
