"""What commands share:

arguments  types that refuse wrong arguments before anything is read
help       `--help` at the width of the terminal
not_yet    what is not planned yet, and what is nearest
scenario   the arguments that say what is trained where
terminal   colours, and a sign of life
"""
