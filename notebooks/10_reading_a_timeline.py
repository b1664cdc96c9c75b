# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a timeline
#
# **Question: the GPU is busy for a tenth of the step. What is it waiting for, and what would help?** Three looks at one
# simulated step: who waited for what, the critical path, and the sensitivities.

# %%
import matplotlib.pyplot as plt
import networkx as nx

import tierplan as tp
from tierplan.planner.prediction import predict
from tierplan.sim.analysis.explain import critical_path, sensitivities, stream_times, time_on_path
from tierplan.sim.output.plots import plot_step_time, plot_timeline

machine = tp.load_machine("desktop-4090")
workload = tp.load_workload("gpt-6.7b", tp.Training(per_device_train_batch_size=8))
p = predict("fuyou", workload, machine)
window = p.steady.window_s
plot_timeline(p.steady.trace, window_s=window)

# %% [markdown]
# Ops of one unit of the model are in full colour, those of the next one pale. Beside a lane stands how busy its stream
# is.
#
# **Look one: waits.** A stream that waits for *input* waits for another stream; one that waits for *memory*, for room.

# %%
times = stream_times(p.steady.trace, window)
for stream, t in times.items():
    print(f"{stream:13} busy {t.busy_s:5.1f} s   waits for input {t.input_s:5.1f} s   for memory {t.memory_s:5.1f} s")
plot_step_time(p.steady.trace, window_s=window)

# %% [markdown]
# **Look two: the critical path.** From the end of the run backwards, always to the op that was waited for last. Time
# on it, by stream, over all simulated steps:

# %%
repeated = tp.unroll(p.schedule, p.steady.num_steps)
path = critical_path(repeated, p.steady.trace)
on_path = time_on_path(path)
print(", ".join(f"{name} {seconds:.1f} s" for name, seconds in on_path.items()))

# %% [markdown]
# The path is one way through a graph: `tp.cause_graph` has every op with all that it waited for, as a networkx graph.
# So any question about causes is a line of networkx, for example how much of the run stands behind one op, over edges
# of no slack:

# %%
causes = tp.cause_graph(repeated, p.steady.trace)
tight = nx.subgraph_view(causes, filter_edge=lambda a, b: causes.edges[a, b]["slack_ns"] == 0)
middle = path[len(path) // 2].key
print(f"{len(nx.descendants(tight, middle))} of {len(causes)} ops would have started later, had {middle} ended later")

# %% [markdown]
# **Look three: sensitivities.** The step simulated anew with one part twice as good:

# %%
gains = sensitivities(p.schedule, machine)
shown = {g.shown_name: 100 * g.gain_frac for g in reversed(gains)}
figure, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
ax.barh(list(shown), list(shown.values()), color="#0072B2")
_ = ax.set(xlabel="% of the step saved, if twice as good")

# %% [markdown]
# **Answer.** The GPU waits for parameters and states from the drive. All three looks agree: the drive is on the
# critical path, and it is what should be faster; a quicker GPU would gain nothing.

# %%
assert max(on_path, key=on_path.get).startswith("nvme")
gain = {g.name: g.gain_frac for g in gains}
compute = times["gpu0.compute"]
assert compute.busy_s < 0.5 * p.step_s
assert compute.input_s + compute.memory_s > 0.5 * p.step_s
assert gains[0].name.startswith("nvme"), "what helps most is the drive, be it one direction or both"
assert gains[0].gain_frac > 0.03
assert gain["gpu0.compute"] < 0.02
