"""Operations that decoding and training both use, and the properties of the device."""
