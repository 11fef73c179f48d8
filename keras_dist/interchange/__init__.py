"""Weights in the formats of other libraries.

* `export.py`: `export_safetensors` writes a model of KerasHub as Hugging Face's libraries read it.
* `adapters.py`: `export_adapter` and `merge_adapter`, for adapters of LoRA in PEFT's format.
* `model_parts.py`: the variables of a model with their elements in the tensors of Hugging Face.
* `converter.py`: which elements of the tensors of Hugging Face each variable has, by KerasHub's converters.
* `hub_source.py`: the config, tensors and other files of an export: of a folder, or of KerasHub's exporters.
* `presets.py`: models of KerasHub's presets, without their weights.
* `output_files.py`: files of safetensors that several processes write, each its own.
"""
