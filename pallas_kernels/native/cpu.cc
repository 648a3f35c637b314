// What Python asks of the pool.
#include "pool.h"

extern "C" {

// Threads that share a product, the caller among them.
int effml_threads() { return effml::Pool::get().threads(); }

// Whole cores that the quotas of a control group leave, at most `most`; for tests, which bring a tree of their own.
int effml_cores(const char* root, const char* groups, int most) { return effml::cores(root, groups, most); }

}
