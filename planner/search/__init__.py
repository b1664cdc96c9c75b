"""The search by simulation:

budget        what it may spend
candidates    a candidate: a plan that was simulated
moves         small changes of a plan
incumbents    the best candidates so far
descent       from one candidate to better ones, move by move; on short chains from random ones, too
patterns      regular plans of long chains, and the descent by them
shifts        moves of many units at once, and the descent by them, on long chains
exchanges     which of two or more units that are alike has which choice
knobs         what the program cannot decide, tuned one after the other
from_program  plans of the planning program, rounded, tuned and simulated; which updates wait for the next step
shape         all plans of one shape, from whatever source
race          the searches of all shapes, side by side
lesser        answers of lesser machines, which better ones have too
batches       the outer search over micro-batch size and accumulation
"""
