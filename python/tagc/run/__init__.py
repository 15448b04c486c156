"""python -m tagc run: compresses the training of a script that knows nothing of tagc.

command.py      the command line, and its order: options, hooks, script
options.py      the options of compress(), from words and files
script.py       runs a script or a module as python does
training.py     torch's two global hooks: which models are compressed, and which optimizers are theirs
checkpoints.py  residuals beside the script's own checkpoints

It uses the public names of tagc.torch and torch alone."""
