"""What several tests share: private servers, small models and tokenizers, runs as processes, stages of learner and wire."""
