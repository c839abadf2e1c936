"""Training text written by the target: it answers prompts, and can write the user turns as well."""
