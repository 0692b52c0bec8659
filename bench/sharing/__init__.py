"""What sharing one model between serving and fine-tuning costs and brings."""
