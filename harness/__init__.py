"""What stands around the loop: settings (every flag of train.py) and presets; rows, the data of a
run; runs, its folder; weights (model.pt); pretrained (--init, LoRA); generation; screen, what a run
prints; facts, a run in words."""
