"""Fast operations, each beside the plain torch that defines it, one operation a file.

Most take ``kernels="torch" | "triton" | "auto"``: the reference, which runs anywhere, one Triton
kernel, or the faster of the two for the device at hand. Differentiable functions keep no more than their
docstrings say. Custom operators (``moekit::...``) hold the launches, so that fake tensors, ``torch.compile``
and CUDA graphs see one operation each.
"""

from moekit.kernels._backend import (
    aligned as aligned,
    check_kernels as check_kernels,
    check_shapes as check_shapes,
    elementwise as elementwise,
    forget_saved as forget_saved,
    is_asked_for as is_asked_for,
    use_triton as use_triton,
)
from moekit.kernels.attention import choose_attention_kernel as choose_attention_kernel
from moekit.kernels.choice import Products as Products, choose_products as choose_products
