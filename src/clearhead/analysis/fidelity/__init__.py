"""How faithful the decompositions of attention layers are, and what they miss: errors.py is the one pass over text.

overlap.py, linear.py, heads.py and tokens.py describe the errors of a layer, scaling.py and across.py the FVU over
sizes and over layers.
"""
