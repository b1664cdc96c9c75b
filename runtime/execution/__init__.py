"""The four rules on real hardware:

instances   buffers and ops in one step, and steps, each joined to the one before
rules       what comes next, grants in list order, ends; what each tier holds
executor    streams as threads
ops         what the ops do, by kind
computing   the ops that compute a unit: micro-batches on their way
values      what a buffer holds: flat memory, an extent of a drive, autograd's tensors; what a commit keeps of it
gradients   a unit's gradients, on the device and away from it
placement   what outlives a step, on its way into its tiers and out
executable  which schedules the runtime executes
agreement   what ops must read and write, so that they train what the step says
device      CUDA, or a byte budget in this machine's memory
fake_device  a CUDA device that is none: as late as can be, and it finds races
threads     how many threads a kernel uses
"""
