"""The search by simulation:

budget        what it may spend
candidates    a candidate: a plan that was simulated
incumbents    the best candidates so far
local         from one candidate to better ones, by local moves
knobs         what the program cannot decide, tuned one after the other
from_program  plans of the planning program, rounded, tuned and simulated; which updates wait for the next step
shape         all plans of one shape, from whatever source
race          the searches of all shapes, side by side
lesser        answers of lesser machines, which better ones have too
batches       the outer search over micro-batch size and accumulation
"""
