"""The whole chain on this machine in two minutes:

demo  measure, plan, simulate, train, compare
"""
