"""Tools for testing functions of one's own: ranks on one machine, gradient parity, transports, kernels."""

from moekit.testing._gradients import check_gradients as check_gradients
from moekit.testing._kernels import check_kernel as check_kernel
from moekit.testing._ranks import ranks as ranks
from moekit.testing._transport import check_transport as check_transport
