"""What a learner reports and writes down."""
