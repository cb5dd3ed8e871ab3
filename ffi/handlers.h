// The FFI handlers of this module, each defined in the file named beside it.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {

XLA_FFI_Error* CpuMatmul(XLA_FFI_CallFrame* frame);          // cpu/matmul.cc
XLA_FFI_Error* CpuRaggedMatmul(XLA_FFI_CallFrame* frame);    // cpu/ragged_matmul.cc
XLA_FFI_Error* CpuTranspose(XLA_FFI_CallFrame* frame);       // cpu/transpose.cc
XLA_FFI_Error* CpuSum(XLA_FFI_CallFrame* frame);             // cpu/sum.cc
XLA_FFI_Error* CpuAdd(XLA_FFI_CallFrame* frame);             // cpu/add.cc
XLA_FFI_Error* CpuOrderByKey(XLA_FFI_CallFrame* frame);      // cpu/order_by_key.cc
XLA_FFI_Error* CpuSegmentReduce(XLA_FFI_CallFrame* frame);   // cpu/segment_reduce.cc
XLA_FFI_Error* CpuUpdateRows(XLA_FFI_CallFrame* frame);      // cpu/update_rows.cc
XLA_FFI_Error* CpuMatrixInverse(XLA_FFI_CallFrame* frame);   // cpu/small_matrices.cc
XLA_FFI_Error* CpuMatrixLu(XLA_FFI_CallFrame* frame);        // cpu/small_matrices.cc
XLA_FFI_Error* CpuMatrixCholesky(XLA_FFI_CallFrame* frame);  // cpu/small_matrices.cc
XLA_FFI_Error* CpuMatrixSolve(XLA_FFI_CallFrame* frame);     // cpu/small_matrices.cc
XLA_FFI_Error* CpuMatrixSvd(XLA_FFI_CallFrame* frame);       // cpu/matrix_decompositions.cc
XLA_FFI_Error* CpuMatrixEigh(XLA_FFI_CallFrame* frame);      // cpu/matrix_decompositions.cc
XLA_FFI_Error* CpuMatrixQr(XLA_FFI_CallFrame* frame);        // cpu/matrix_decompositions.cc

XLA_FFI_Error* CudaLaunchInstantiate(XLA_FFI_CallFrame* frame);        // cuda_launch.cc
XLA_FFI_Error* CudaLaunchInitialize(XLA_FFI_CallFrame* frame);         // cuda_launch.cc
XLA_FFI_Error* CudaLaunchExecute(XLA_FFI_CallFrame* frame);            // cuda_launch.cc
XLA_FFI_Error* CudaLaunchExecuteChecked(XLA_FFI_CallFrame* frame);     // cuda_launch.cc
XLA_FFI_Error* CudaLaunchExecuteOverlapped(XLA_FFI_CallFrame* frame);  // cuda_launch.cc

// The type of the state that CudaLaunchInstantiate makes, which must be registered before the
// handlers.
XLA_FFI_TypeId* CudaLaunchStateId();      // cuda_launch.cc
XLA_FFI_TypeInfo* CudaLaunchStateInfo();  // cuda_launch.cc
}
