"""What is trained on:

text       micro-batches from text files or arrays of tokens
ahead      micro-batches that are fetched while the device computes
synthetic  versions, and models and batches that are the same for the same seed
"""
