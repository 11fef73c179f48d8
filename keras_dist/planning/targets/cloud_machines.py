"""Names of machines with GPUs, as clouds and notebook services spell them."""

import re

# A pattern of names, the hardware, and the number of GPUs; None if the name has it.
_MACHINES: tuple[tuple[str, str, int | None], ...] = (
    # Google Cloud: https://cloud.google.com/compute/docs/accelerator-optimized-machines
    (r"a2-highgpu-([1248])g", "a100-40gb", None),
    (r"a2-megagpu-16g", "a100-40gb", 16),
    (r"a2-ultragpu-([1248])g", "a100", None),
    (r"a3-highgpu-([1248])g", "h100", None),
    (r"a3-(?:mega|edge)gpu-8g", "h100", 8),
    (r"a3-ultragpu-8g", "h200", 8),
    (r"a4-highgpu-8g", "b200", 8),
    (r"a4x-highgpu-4g", "gb200", 4),
    (r"a4x-maxgpu-4g-metal", "gb300", 4),
    (r"g2-standard-(?:4|8|12|16|32)", "l4", 1),
    (r"g2-standard-24", "l4", 2),
    (r"g2-standard-48", "l4", 4),
    (r"g2-standard-96", "l4", 8),
    (r"g4-standard-48", "rtx-pro-6000", 1),
    (r"g4-standard-96", "rtx-pro-6000", 2),
    (r"g4-standard-192", "rtx-pro-6000", 4),
    (r"g4-standard-384", "rtx-pro-6000", 8),
    # AWS: https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html
    (r"p3\.2xlarge", "v100", 1),
    (r"p3\.8xlarge", "v100", 4),
    (r"p3\.16xlarge", "v100", 8),
    (r"p3dn\.24xlarge", "v100-32gb", 8),
    (r"p4d\.24xlarge", "a100-40gb", 8),
    (r"p4de\.24xlarge", "a100", 8),
    (r"p5\.4xlarge", "h100", 1),
    (r"p5\.48xlarge", "h100", 8),
    (r"p5en?\.48xlarge", "h200", 8),
    (r"p6-b200\.48xlarge", "b200", 8),
    (r"p6-b300\.48xlarge", "b300", 8),
    (r"p6e-gb200\.36xlarge", "gb200", 4),
    (r"g4dn\.(?:|2|4|8|16)xlarge", "t4", 1),
    (r"g4dn\.12xlarge", "t4", 4),
    (r"g4dn\.metal", "t4", 8),
    (r"g5\.(?:|2|4|8|16)xlarge", "a10g", 1),
    (r"g5\.(?:12|24)xlarge", "a10g", 4),
    (r"g5\.48xlarge", "a10g", 8),
    (r"g6\.(?:|2|4|8|16)xlarge|gr6\.[48]xlarge", "l4", 1),
    (r"g6\.(?:12|24)xlarge", "l4", 4),
    (r"g6\.48xlarge", "l4", 8),
    (r"g6e\.(?:|2|4|8|16)xlarge", "l40s", 1),
    (r"g6e\.(?:12|24)xlarge", "l40s", 4),
    (r"g6e\.48xlarge", "l40s", 8),
    (r"g7e\.[248]xlarge", "rtx-pro-6000", 1),
    (r"g7e\.12xlarge", "rtx-pro-6000", 2),
    (r"g7e\.24xlarge", "rtx-pro-6000", 4),
    (r"g7e\.48xlarge", "rtx-pro-6000", 8),
    # Azure: https://learn.microsoft.com/azure/virtual-machines/sizes/overview#gpu-accelerated
    (r"Standard_NC(?:4|8|16)as_T4_v3", "t4", 1),
    (r"Standard_NC64as_T4_v3", "t4", 4),
    (r"Standard_NV36adm?s_A10_v5", "a10", 1),
    (r"Standard_NV72ads_A10_v5", "a10", 2),
    (r"Standard_NC24ads_A100_v4", "a100-pcie", 1),
    (r"Standard_NC48ads_A100_v4", "a100-pcie", 2),
    (r"Standard_NC96ads_A100_v4", "a100-pcie", 4),
    (r"Standard_NC40ads_H100_v5", "h100-nvl", 1),
    (r"Standard_NC80adis_H100_v5", "h100-nvl", 2),
    (r"Standard_ND96asr_v4", "a100-40gb", 8),
    (r"Standard_ND96amsr_A100_v4", "a100", 8),
    (r"Standard_ND96isr_H100_v5", "h100", 8),
    (r"Standard_ND96isr_H200_v5", "h200", 8),
    (r"Standard_ND128isr_NDR_GB200_v6", "gb200", 4),
    (r"Standard_ND128isr_GB300_v6", "gb300", 4),
    # Kaggle, "Accelerator" in the settings of a notebook: https://www.kaggle.com/docs/notebooks
    (r"GPU T4 x2", "t4", 2),
    (r"GPU P100", "p100", 1),
)


def gpus_of_machine(name: str) -> tuple[str, int] | None:
    """Returns the hardware and the number of GPUs of a machine; None if the name is no machine's.

    >>> gpus_of_machine("g5.12xlarge")
    ('a10g', 4)
    """
    for pattern, chip, count in _MACHINES:
        if machine := re.fullmatch(pattern, name):
            return chip, int(machine[1]) if count is None else count
    return None
