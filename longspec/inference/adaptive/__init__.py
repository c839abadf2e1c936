"""Method "auto": before each round a controller chooses between plain decoding, prompt lookup and draft trees."""
