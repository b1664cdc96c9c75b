"""Many configurations, predicted and run. In reading order:

spec      the campaign's file: groups of runs
checks    whether all runs ask for what there is, before the first starts
run       predicts, trains and compares each run
artifact  the file that each run leaves
summary   statistics of all artifacts (errors, intervals, ranking), and the campaign's page
"""
