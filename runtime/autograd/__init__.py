"""An unmodified model, run unit by unit:

units   a model's units, with their parameters in flat buffers
hooks   where the model is caught: each block's `forward`
micro_batch  one micro-batch on its way through the units, as a coroutine where other ops come in between
flow    how the schedule's ops follow each other
containers  lists and dictionaries that a block is given, and may change
absent  numbers that only other ranks of a pipeline have, and what comes of them
cuts    cuts in autograd's graph between units
nests   the tensors in what blocks get and give
saved   what autograd saves in a unit, as storages that may be moved away
chunked_loss  cross entropy over a part of the tokens at a time
coded  linear layers of a frozen base, in codes
replay  single saved tensors made again
plain_values  plain values that modules hold, by which their forward may compute
"""
