"""Elastic training: a batch size, a learning rate and a number of workers that change while a job trains."""
