"""`lynx-net doctor`: measures a link and says why it is below its rate.

`facts` is what was measured, `findings` the pure function that judges it; `kernel`, `raw`, `probe` and `serving`
measure; `cli` is the command.
"""
