"""Kills a run wherever it may be, and looks at what is left.

consistency    Whether anything that was committed can be lost
mistakes       Mistakes in how a run keeps its commits
states         What a crash may leave of a run's files
"""
