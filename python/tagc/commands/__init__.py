"""What `python -m tagc` does: commands that need neither the C command nor, but for advise, torch.

main.py      the first word, and what is printed if it is wrong
plan.py      memory, bytes and time of a cluster that need not be there, of the planner of the C command
advise.py    what compressing is worth on the link between the ranks that run it
data.py      text and JSON lines into token files, by any tokenizer
info.py      what this installation has"""
