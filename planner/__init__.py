"""From a workload and a machine to a plan, and from a plan to a schedule. In reading order:

plan             the decisions: what lives where, what happens to every saved tensor, when updates run
plan_rules       the words of plans, and the rules that they keep
policies         published systems, one file each: functions to a plan
lowering         from a plan for one device to a schedule
several_devices  from packs and partitions to a schedule, and the search for packs
prediction       what a plan gives, in the figures that people compare
milp             the planning program and its bound (docs/planner.md has the mathematics)
results          what planning gives
search           candidates by simulation: moves, knobs, restarts, batches
compared         the published systems beside a search
infeasible       what to say when no plan fits
loop             the search for one division of a batch: bound, solve, round, lower, simulate, refine
planning         a machine's plan, which is never worse than that of the lesser machine in it
questions        the largest model, how long drives last
plan_file        the plan as a file
training_files   settings from configurations of DeepSpeed, accelerate and the Hugging Face Trainer
"""
