"""The weight wire between a sender and receivers, some of them in processes of their own."""
