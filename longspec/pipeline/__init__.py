"""From a target to a trained, measured draft, in steps that resume: `longspec draft`."""
