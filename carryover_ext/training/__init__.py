"""Training of drafters: recordings of a target's answers, feature cache, parallel draft-verify-draft."""
