"""From one candidate to better ones, by local moves:

moves      small changes of a plan
descent    move by move; on short chains from random plans, too
exchanges  which of two or more units that are alike has which choice
shifts     moves of many units at once, and the descent by them, on long chains
patterns   regular plans of long chains, and the descent by them
"""
