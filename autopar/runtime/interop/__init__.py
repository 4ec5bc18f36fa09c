"""The sharded module as other libraries see it: its forward, whole tensors to save, attributes that trainers read."""
