// One source for host and device: functions marked MOEWAVE_HD compile for both under nvcc and for the host elsewhere.
#pragma once

#if defined(__CUDACC__)
#define MOEWAVE_HD __host__ __device__
#else
#define MOEWAVE_HD
#endif
