"""What commands share:

arguments  types that refuse wrong arguments before anything is read
scenario   the arguments that say what is trained where
"""
